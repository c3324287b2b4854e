"""Tier of the prefix cache on the disk: files of blocks, their index, their writer and their reader."""
