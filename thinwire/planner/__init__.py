"""Chooses and explains before anything runs: what each strategy would hold in memory and send on a cluster."""
