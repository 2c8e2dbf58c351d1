"""Requests to forget that come one after another: what stays forgotten, and what utility is left?"""
