"""The HTTP gateway: a stateless client of coordinators (`python -m gateway`).

It answers in OpenAI's and Anthropic's form and loads neither torch nor a tokenizer. A stream survives the death of the
coordinator behind it, because `specdec.client` resumes it at another one.
"""
