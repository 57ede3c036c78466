"""Tests whether a user's loss, advantages, mean, whitening or logprobs are those of an algorithm, term by term.

`diagnosis.conform` calls a function (`calling`, and `trl` for trainers) on batches, and looks for the formula that
gives what it returned (`terms`). What is right, and the ways to compute each term, are in `losses`, `advantages` and
`logprobs`; `properties` are what all right functions have. `museum` has reported bugs, as functions.
"""
