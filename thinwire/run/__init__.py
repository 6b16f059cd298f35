"""The description of a run: its configuration, its files, and what its processes need to know.

Nothing is trained here.
"""
