"""The only room that talks to other ranks: start-up, process groups, the exchange, collectives and native kernels.

Everything above asks :mod:`pyg_dist.backend.session.session` who it is. Nothing is imported here, so that plans and the
command line stay light.
"""
