"""The OpenAI API over HTTP: a thin door onto the coroutine that a request lives in."""
