"""What a run is asked to do, where its files lie, and what its processes are told; nothing is trained here."""
