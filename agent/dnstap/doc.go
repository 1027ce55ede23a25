// Package dnstap sends queries and their responses to a receiver of dnstap (https://dnstap.info), such as Vector,
// dnscollector or fstrm_capture, over Frame Streams.
//
//	target.go   Target: where the receiver is
//	frame.go    Frame Streams: control frames, and the frames of messages
//	message.go  a query and its response as messages of dnstap.proto
//	sender.go   Sender: the connection to the receiver
//	metrics.go  the metrics
//
// Each query makes two messages, CLIENT_QUERY and CLIENT_RESPONSE, whether the table, the cache or a nameserver answers
// it. A query without a response makes only the first. Messages wait in the queue of a [seen.Reader]. While the queue is
// full, because the receiver is slow or away, further messages are dropped and counted; no query waits.
//
// This package does not use the libraries of the dnstap project: their last release was in 2021.
package dnstap
