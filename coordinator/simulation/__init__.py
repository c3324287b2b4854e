"""A pool in virtual time: the production router and membership over modelled Macs, for `cluster simulate` and tests."""
