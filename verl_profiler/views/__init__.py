"""What users read: text, plots and the HTML report, made of the tables of `analysis`."""
