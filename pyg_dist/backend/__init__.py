"""The only package that communicates: start-up, process groups, the exchange, collectives; and the native kernels.

Everything above gets its rank from :mod:`pyg_dist.backend.session.session`. Nothing is imported here, so that plans and
the command line start quickly.
"""
