"""`gac study`: compares methods over seeds, with paired differences and confidence intervals;
resumable.
"""
