"""Tests whether a user's loss, advantages, mean, whitening or logprobs are those of an algorithm, term by term.

`diagnosis.conform` calls a function (`calling`, and `trl` for trainers) on batches, and looks for the formula that
gives the function's results (`terms`). `losses`, `advantages` and `logprobs` have the references, and the ways to
compute each term. `properties` has properties of all right functions. `museum` has reported bugs, as functions.
"""
