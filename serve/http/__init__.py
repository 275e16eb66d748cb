"""The HTTP front: OpenAI's request and response shapes over a `serve.requests.Service`."""
