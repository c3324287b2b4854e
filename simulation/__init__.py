"""Simulate a pool in virtual time, with the production router and membership, and modelled Macs.

`cluster simulate` and tests run simulations.
"""
