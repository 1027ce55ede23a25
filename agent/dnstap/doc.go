// Package dnstap sends queries and their responses to a receiver of dnstap (https://dnstap.info), such as Vector,
// dnscollector or fstrm_capture, over Frame Streams.
//
//	sender.go   Sender: the connection to the receiver, the control frames of Frame Streams, Target, and the metrics
//	message.go  a query and its response as messages of dnstap.proto, in frames
//
// Each query makes two messages, CLIENT_QUERY and CLIENT_RESPONSE, whether the table, the cache or a nameserver answers
// it. A query without a response makes only the first. Messages wait in the queue of a [seen.Reader]. While the queue is
// full, because the receiver is slow or away, further messages are dropped and counted; no query waits.
//
// This package does not use the libraries of the dnstap project: their last release was in 2021.
package dnstap
