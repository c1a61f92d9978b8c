"""Anyrun: which node runs which environment, for hundreds of thousands of them, and the service around that.

shapes.py and scheduler.py (with nodes.py, table.py, tenants.py) are the decisions, free of clocks and I/O.
"""
