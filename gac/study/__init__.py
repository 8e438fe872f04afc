"""`gac study`: a resumable comparison of methods over seeds, with paired differences.

This package may import `report` and earlier packages.
"""
