"""`gac study`: a resumable comparison of methods over seeds, with paired differences."""
