"""Structured output: a grammar says which tokens may come next, and the sampler chooses among them.

The front end makes the grammar's text from a request and checks it. A worker compiles it before the request is
scheduled. The grammar engine is llguidance (https://github.com/guidance-ai/llguidance): an Earley parser over lexemes,
which are derivatives of regular expressions. Counters bound its work, so no grammar takes unbounded time.
"""
