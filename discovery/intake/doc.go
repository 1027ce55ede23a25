// Package intake counts the bytes of requests that have arrived, and that no handler has read. gRPC has no bound for them:
// it keeps a message that is half received, of up to 1 MiB, and takes a hundred bytes more for each frame, and a client may
// send each byte in a frame of its own. If all clients have sent too many bytes, package connlimit closes a connection.
//
// It also ends a connection that has begun too many streams.
package intake
