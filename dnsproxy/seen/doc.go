// Package seen records which queries were answered, how, and for which client.
//
// A query is noteworthy if it failed, was slow, or was odd in another way; [Kind] has the list. The last 1,000
// failures, and the last 1,000 other noteworthy queries, are kept in two rings, so that slow queries do not push out
// failures.
//
// A [Reader] reads these queries, and then the queries that are answered from now on. A [Filter] selects which ones.
// Clients of the agent may have at most 8 readers at a time. A reader of the agent itself may also get the messages.
//
//	query.go      Query: what the query path knows of a query
//	recorder.go   Recorder: the rings, and the readers
//	reader.go     Reader: the queries in the rings, and then new ones
//	record.go     Record: a query for people and programs
//	filter.go     which queries a reader wants
//	client.go     the socket of a client, by sock_diag: its user and its cgroup
//	units.go      the names of cgroups
//
// # What it costs
//
// As long as no reader wants ordinary queries, an ordinary query of the fast path costs one atomic load
// ([Recorder.Start]). The clock is not read and nothing is copied. If a reader wants ordinary queries, the clock is
// read twice and the filters are compared, which takes 65 ns. For a query of the slow path the clock is always read
// twice, because the query may be slow.
//
// A noteworthy query is copied, and its client is looked up by one request to the kernel.
// This takes 4 µs, and up to 20 µs on a busy machine. It happens before the answer is sent, because afterwards the
// client closes its socket. Lookups have a budget of time, which is enough for 2,000 failures a second. If there are
// more, some records have only the address of the client.
//
// A query that is kept, or that a reader wants, is copied, at most 0.8 KB of it, and given to rings and readers by pointer.
// No writer waits for a reader: each reader has a queue, and if the queue is full, further queries are counted as lost.
package seen
