"""What every other folder may import: how a process ends, and files on the disk.

Imports no torch.
"""
