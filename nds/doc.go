// Package nds keeps the table of mesh hosts up to date: it holds an ADS stream
// to a control plane and gives every NameTable that comes to an [ApplyFunc].
//
// A push is read straight down: [Client.Run] connects, and after a failure
// waits and connects again; stream.run receives responses and answers them;
// fold turns a response into the complete set of resources; Client.use gives the
// set to the apply function. All of it is one goroutine, so pushes are applied
// one after the other, in the order they came, and the last one wins.
//
// What a response means:
//
//   - The set of resources belongs to the stream. It starts empty and nothing of
//     an earlier stream is announced to the control plane, which therefore sends
//     everything again; istiod does so in any case.
//   - A state-of-the-world response is the whole set. One without resources is
//     an empty table.
//   - An incremental response changes the set by what it names. One that names
//     nothing changes nothing; as the first of a stream it therefore says that
//     there is nothing, and the table becomes empty.
//   - A set with the names and bytes of the one in use is not applied again.
//   - A response is ACKed when its set is in use. If it cannot be read or the
//     apply function refuses it, it is NACKed with the reason, all of it, and
//     the set and the table stay as they were. If that was the first response of
//     an incremental stream, the next ones change the table in use, since the
//     control plane will not send the rest again.
//
// The node is what [Config.Refresh] says at the moment of the connect. When it says
// something else later, the stream is ended and another one opened.
//
// Where the bearer token is not renewed by others, it is exchanged for a workload
// certificate (workload.go), which the client renews and keeps in the state directory.
//
// A control plane without the incremental RPC is asked for the state of the
// world for an hour, after which the next connect tries the RPC again. The table in use survives a lost stream, and, with a state
// directory, the process.
package nds
