"""Finishes files: each appears whole or not at all, and is uploaded and announced. Also derives files from traces."""
