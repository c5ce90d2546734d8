"""What every other folder may import: files on the disk. Imports configurator alone, and no torch."""
