"""Modules and functions for models on distributed or plain tensors."""

from pyg_dist.nn.norm_relu_dropout import NormReLUDropout, norm_relu_dropout

__all__ = ["NormReLUDropout", "norm_relu_dropout"]
