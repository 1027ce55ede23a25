// Package load sends DNS queries at a steady rate and checks every answer. The command
// nametap-load does the same in a virtual machine or a pod.
//
// The load is open: each query is sent at its time, however late the answers are. So an
// outage of a second shows as the queries of a second, not as one slow query.
//
// Files: load.go counts and reports, expect.go what is asked and which answers are right, send.go the schedule and the
// sockets.
package load
