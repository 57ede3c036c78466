"""Whether a loss, advantages, a mean, whitening or logprobs of somebody are an algorithm's, and what differs if not.

`diagnosis.conform` calls a function (`calling`, and `trl` for trainers) on batches, and looks for the formula that
gives what it returned (`terms`). What is right, and the ways to compute each term, are in `losses`, `advantages` and
`logprobs`; `properties` are what all right functions have. `museum` has reported bugs, as functions.
"""
