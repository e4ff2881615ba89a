"""Who may send how much, and when: API keys and tenants, token rates, fair sharing, shedding with a time to return."""
