"""GAC in ms-swift: pass this file as --external_plugins.

docs/integrations/others.md has the other options.
"""

import gac.integrations.swift  # noqa: F401 - replaces swift's GRPO trainer with ours
