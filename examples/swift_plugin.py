"""GAC in ms-swift: pass this file as --external_plugins.

    GAC_METHOD='"gac"' swift rlhf --rlhf_type grpo --external_plugins examples/swift_plugin.py \
        --chord_sft_dataset demos.jsonl --chord_sft_per_device_train_batch_size 2 ...
"""

import gac.integrations.swift  # noqa: F401 - replaces swift's GRPO trainer with ours
