"""`gac study`: compares methods over seeds, with paired differences and confidence intervals; resumable.

It may import `demo` and earlier packages.
"""
