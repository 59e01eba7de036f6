"""What several test files share: judges, servers, runs, stores. None of it holds a test."""
