// Package dnstap sends queries and their responses to a receiver of dnstap (https://dnstap.info), such as Vector,
// dnscollector or fstrm_capture, over Frame Streams.
//
//	target.go   Target: where the receiver is
//	frame.go    Frame Streams: control frames, and the frames of messages
//	message.go  a query, and its response, as dnstap.proto has them
//	sender.go   Sender: the connection to the receiver
//	metrics.go  what was sent and what was dropped
//
// Each query makes two messages, CLIENT_QUERY and CLIENT_RESPONSE, whatever answers it: the table, the cache or a
// nameserver. They wait in the queue of [seen.Exchanges]. While the receiver is slow or away, further ones are dropped
// and counted; no query waits.
//
// The libraries of the dnstap project had their last release in 2021. Their part that is needed here is two kinds
// of frames and 17 fields.
package dnstap
