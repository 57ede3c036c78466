"""Losses and advantages written from the papers' equations, by somebody who had not read rlflow's code.

Loops over responses and tokens in float64, in the papers' own symbols. A batch is ragged: `log_pi[i][t]` is the logprob
of token t of response i under the policy that is trained, `log_old`, `log_mu`, `log_ref` the same under the policy at
the start of the step, the sampling engine's and the reference. Rewards and advantages are floats, `A[i]` or `A[i][t]`.
Every loss is one number to be minimised, so autograd through it gives the paper's gradient.

A page is named where the text that was read had pages, else the section. "Source" says what was read where that was not
the paper itself. The exception to the first sentence is `score_centering`, which says so.
"""
