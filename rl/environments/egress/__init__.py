"""Anygress: the only way out of a sandbox, for what a policy names. Nothing leaves otherwise.

policy.py decides; certificates.py makes each environment's own root; redirect.py catches connections inside the sandbox's network
namespace; proxy.py reads, judges, writes on and logs them; way_out.py puts all that around a sandbox.
"""
