// Package load sends DNS queries at a steady rate and checks every answer. The command
// nametap-load does the same in a virtual machine or a pod.
//
//	l, err := load.Start(load.Config{
//		Server: netip.MustParseAddrPort("10.0.0.53:53"),
//		Rate:   2000,
//		Kept:   0.2,
//		TCP:    0.05,
//		Expect: &load.Expectation{Questions: []load.Question{
//			{Name: "web.shop.svc.cluster.local", Addresses: load.Addrs("10.1.0.1")},
//			{Name: "*.example.org", Addresses: load.Addrs("192.0.2.53")},
//		}},
//	})
//	…
//	report := l.Stop()
//	if report.Bad() > 0 { t.Errorf("%v", report) }
//
// The load is open: each query is sent at its time, however late the answers are. So an
// outage of a second shows as the queries of a second, not as one slow query.
//
// Expected answers may change while the load runs:
//
//	l.Expect(before, after) // both are right
//	push(after)
//	await(after)
//	l.Expect(after)
//
// An answer is right if it was expected at some time between the query and the answer.
//
// Files: load.go counts and reports, expect.go what is asked and which answers are right, send.go the schedule and the
// sockets.
package load
