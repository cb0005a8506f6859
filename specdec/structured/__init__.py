"""Structured output: which tokens a constraint allows (docs/protocol.md section 11).

    grammar          a constraint's text as a grammar of llguidance
    json_schema      what of a JSON schema llguidance would pass over
    admission        the check before a request is accepted
    token_table      the bytes of the vocabulary's tokens, as llguidance reads them
    matcher          the state of one session: masks, draft tokens, rollback
    mask_threads     the masks of a replica's calls, within limits of time
    paced_threads    threads for matchers, in which slow sessions do not delay others

The state of a matcher depends only on the tokens of a turn, so nothing of it is stored or sent. Targets mask p with it,
and coordinators compile each constraint before they admit its request.
"""
