"""What users start: command line, tables and JSON."""
