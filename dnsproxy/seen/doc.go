// Package seen records which queries were answered, how, and for which client.
//
// The last 1,000 failures, and the last 1,000 other noteworthy queries, are kept in two rings: slow queries do not push
// out failures ([Kind] says which is which). A third ring has the last 256 truncated responses. A truncated response
// becomes noteworthy if its client does not ask again over TCP within 5 s. A [Reader] also gets the queries that are
// answered from now on, as a [Filter] selects them; clients of the agent may have 8 readers at most. [Exchanges] also
// reads the messages.
//
//	query.go      Query: what the query path knows of a query; its form in a slot
//	ring.go       slots that a writer never waits for
//	truncated.go  truncated responses, whose clients should ask again
//	recorder.go   Recorder: the rings, and the readers
//	reader.go     Reader: what is in the rings, then what comes
//	exchanges.go  Exchanges: queries with their messages, in a queue
//	record.go     Record: a query for people and programs
//	filter.go     which queries a reader wants
//	client.go     the socket of a client, by sock_diag: its user and its cgroup
//	hostaddrs.go  the addresses of this host
//	units.go      the names of cgroups
//
// # What it costs
//
// While all readers select noteworthy queries, an ordinary query of the fast path costs one atomic load
// ([Recorder.Start]). The clock is not read and nothing is copied. With a reader of ordinary queries, the clock is read
// twice and the filters are compared, which takes 65 ns. For a query of the slow path the clock is always read twice,
// because the query may be slow. A noteworthy query is written into a slot of 512 bytes, and its client is looked up by
// one request to the kernel (4 µs, and up to 20 µs on a busy machine), before the answer is sent: afterwards the client
// closes its socket. Lookups have a budget of time, which is enough for 2,000 failures a second. In a greater flood
// some records have only the address of the client.
//
// A writer takes a slot by an atomic add and marks it by a sequence number. It takes no lock, allocates nothing and
// waits for no reader. A reader that is overtaken counts what it has lost. The slots are allocated when the first
// query is written: 1 MB for two rings, and 130 KB for the third one and for each reader.
package seen
