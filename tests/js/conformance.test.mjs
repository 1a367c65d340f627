// The official conformance suite, unmodified, against the server named by CONFORMANCE_TEST_URL.
// Started by tests/conformance/test_official_suite.py, which reads the report and counts.
import { runConformanceTests } from "@durable-streams/server-conformance-tests";

runConformanceTests({
  baseUrl: process.env.CONFORMANCE_TEST_URL,
  longPollTimeoutMs: Number(process.env.CONFORMANCE_LONG_POLL_MS),
  subscriptions: true,
});
