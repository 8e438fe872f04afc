"""`gac study`: methods compared over seeds, paired, with intervals; resumable run by run."""
