"""What every other folder may import: files on the disk. Imports errors.py alone, and no torch."""
