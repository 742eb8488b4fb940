"""`/v1/responses`: OpenAI's Responses API, without a store, implemented with this server's chats."""
