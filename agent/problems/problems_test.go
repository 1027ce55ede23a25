package problems_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/agent/problems"
	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/nds"
)

// healthy returns the readings of a host without a problem.
func healthy() *problems.Readings {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	return &problems.Readings{
		Now: now,
		Agent: &problems.Agent{
			StateDir: "/var/lib/nametap", XDS: nds.Status{Connected: true, Loaded: true, Address: "istiod:15012", Pushes: 3},
			Servers: []problems.Server{server("10.96.0.10"), server("10.96.0.11")},
			Capture: &problems.Capture{On: true, Active: true},
		},
		Host: &problems.Host{
			ResolvConf: "/etc/resolv.conf", Servers: []string{"10.96.0.10", "10.96.0.11"}, Hosts: []string{"files", "dns"}, Domain: "cluster.local",
			Ways: []problems.Probe{{To: "10.96.0.10:53", Network: "udp", State: problems.ProbeAgent}, {To: "10.96.0.10:53", Network: "tcp", State: problems.ProbeAgent}},
		},
	}
}

// server returns a nameserver that answers.
func server(address string) problems.Server {
	return problems.Server{Status: upstream.Status{Spec: upstream.Spec{Addr: netip.AddrPortFrom(netip.MustParseAddr(address), 53)}}}
}

// token is a token that was issued, and expires, a time from now.
func token(r *problems.Readings, issued, expires time.Duration) nds.Token {
	return nds.Token{File: "/var/run/secrets/tokens/istio-token", Issued: r.Now.Add(issued), Expires: r.Now.Add(expires)}
}

// fail adds failures of different names for one reason, in the last 15 s.
func fail(r *problems.Readings, reason string, names ...string) {
	for i, name := range names {
		r.Agent.Failures = append(r.Agent.Failures, seen.Record{
			Time: r.Now.Add(-15 * time.Second * time.Duration(len(names)-i) / time.Duration(len(names))), Client: netip.MustParseAddrPort("127.0.0.1:4711"), Unit: "gitea.service",
			Name: name + ".", Type: "A", Rcode: "SERVFAIL", Reason: reason, Rows: []string{"F3"},
		})
	}
}

// repaired makes readings show repairs.
func repaired(r *problems.Readings, apart time.Duration, times int) {
	for i := range times {
		r.Agent.Capture.Repaired = append(r.Agent.Capture.Repaired, r.Now.Add(apart*time.Duration(i-times+1)))
	}
	r.Agent.Capture.Repairs = uint64(times)
}

// R15: what doctor says first about hosts with a defect: its cause, with the server or the file.
func TestBroken(t *testing.T) {
	for want, breaks := range map[string]func(r *problems.Readings){
		"problem: no agent answers on this host": func(r *problems.Readings) { r.Agent, r.Host.Absent, r.Host.Ways = nil, "connection refused", nil },
		"problem: /etc/resolv.conf cannot be read": func(r *problems.Readings) {
			r.Host.Unread, r.Host.Servers = "it is a link to /run/x, which does not exist", nil
		},
		"problem: /etc/resolv.conf names no nameserver":                              func(r *problems.Readings) { r.Host.Servers, r.Agent.Servers, r.Host.Ways = nil, nil, nil },
		"warning: /etc/resolv.conf names 4 nameservers, but programs use only three": func(r *problems.Readings) { r.Host.Servers = []string{"a", "b", "c", "d"} },
		"problem: /etc/nsswitch.conf has no dns for hosts":                           func(r *problems.Readings) { r.Host.Hosts = []string{"files", "myhostname"} },
		"warning: /etc/nsswitch.conf asks mDNS for names below .local, and then no": func(r *problems.Readings) {
			r.Host.Hosts, r.Host.MDNS = []string{"files", "mdns4_minimal", "[NOTFOUND=return]", "dns"}, true
		},
		"warning: an address of the agent, not for DNS, cannot be opened; retrying": func(r *problems.Readings) { r.Agent.Unserved = []string{"the status address :15020: in use"} },
		"warning: a DNS listener cannot be opened; retrying":                        func(r *problems.Readings) { r.Agent.Missing = []string{"listen tcp [::1]:15053: in use"} },
		"problem: DNS listeners of the agent do not answer": func(r *problems.Readings) {
			r.Agent.Silent, r.Agent.Capture.Active = []string{"udp 127.0.0.1:15053: timeout"}, false
			r.Host.Ways = []problems.Probe{{To: "10.96.0.10:53", Network: "udp", Error: "timeout"}}
		},
		"warning: the table cannot be saved in /var/lib/nametap": func(r *problems.Readings) { r.Agent.XDS.SnapshotError = "no space left on device" },
		"problem: the clock of this host is at least 1h0m0s behind": func(r *problems.Readings) {
			r.Agent.XDS = nds.Status{Address: "istiod:15012", LastError: "x509: certificate has expired or is not yet valid"}
			r.Agent.Token = token(r, time.Hour, 2*time.Hour)
		},
		"problem: the token for the control plane has expired": func(r *problems.Readings) {
			r.Agent.XDS = nds.Status{Address: "istiod:15012", Loaded: true, Stale: true, TableAge: 11520, LastError: "rpc error: code = Unauthenticated desc = no"}
			r.Agent.Token = token(r, -4*time.Hour, -3*time.Hour)
		},
		"warning: the token for the control plane expires in 5m0s": func(r *problems.Readings) { r.Agent.Token = token(r, -55*time.Minute, 5*time.Minute) },
		"warning: the workload certificate cannot be obtained":     func(r *problems.Readings) { r.Agent.XDS.CertificateError = "connection refused" },
		"problem: the control plane istiod:15012 refuses the agent": func(r *problems.Readings) {
			r.Agent.XDS = nds.Status{Address: "istiod:15012", LastError: "rpc error: code = PermissionDenied desc = no"}
		},
		"warning: the control plane istiod:15012 refuses connections": func(r *problems.Readings) {
			r.Agent.XDS.Connected, r.Agent.XDS.LastError = false, "connection refused"
		},
		"problem: the control plane istiod:15012 answers, and ends the connection": func(r *problems.Readings) {
			r.Agent.XDS = nds.Status{
				Address:   "istiod:15012",
				LastError: "receiving a push: rpc error: code = Unavailable desc = reviewing the token: certificate of 10.96.0.1:443: dial tcp: lookup kubernetes: no such host",
			}
		},
		"problem: the agent cannot read the token (--xds-token-file)": func(r *problems.Readings) {
			r.Agent.XDS = nds.Status{Address: "istiod:15012", LastError: "reading the token (--xds-token-file): open /t: permission denied"}
		},
		"problem: the name of the control plane istiod:15012 does not resolve": func(r *problems.Readings) {
			r.Agent.XDS = nds.Status{Address: "istiod:15012", LastError: "dial tcp: lookup istiod on 10.96.0.10:53: no such host"}
		},
		"problem: 10.96.0.10, the first nameserver, does not reply ": func(r *problems.Readings) {
			r.Agent.XDS = nds.Status{Address: "istiod:15012", LastError: "dial tcp: lookup istiod on 10.96.0.10:53: i/o timeout"}
			for i := range r.Agent.Servers {
				r.Agent.Servers[i].State, r.Agent.Servers[i].LastErrorAt = upstream.Down, r.Now
			}
		},
		"problem: the agent does not accept the certificate of the control plane istiod:15012": func(r *problems.Readings) {
			r.Agent.XDS = nds.Status{Address: "istiod:15012", LastError: "tls: failed to verify certificate: x509: certificate signed by unknown authority"}
		},
		"problem: the control plane istiod:15012 has sent no table ": func(r *problems.Readings) {
			r.Agent.XDS = nds.Status{Address: "istiod:15012", Open: true, LastError: "i/o timeout"}
		},
		"problem: a setting of this command cannot be used": func(r *problems.Readings) {
			r.Agent, r.Host.Settings, r.Host.SettingsOf, r.Host.Ways = nil, "line 1", "a setting of this command", nil
		},
		"problem: no agent answers on this host, and dnsmasq (process 7) has its port": func(r *problems.Readings) {
			r.Agent, r.Host.Absent, r.Host.Ways, r.Host.Taken = nil, "connection refused", nil, []problems.Taken{{Address: "udp [::1]:15053", Program: "dnsmasq (process 7)"}}
		},
		"warning: the running agent has another version than this command": func(r *problems.Readings) {
			r.Host.Version, r.Host.Running = "v0.2.0", "v0.1.0"
		},
		"warning: the settings files have changed, and cannot be used": func(r *problems.Readings) {
			r.Agent.Settings = problems.Settings{Refused: "line 1", Pending: []string{"--ttl"}}
		},
		"warning: settings have changed that take effect after a restart: --ttl": func(r *problems.Readings) {
			r.Agent.Settings.Pending = []string{"--ttl"}
		},
		"problem: the connection tracking of the kernel is full": func(r *problems.Readings) {
			r.Agent.Conntrack, r.Agent.Silent = problems.Resource{Used: 1000, Limit: 1000}, []string{"timeout"}
		},
		"problem: the agent has no free descriptors": func(r *problems.Readings) {
			r.Agent.Descriptors, r.Agent.Silent = problems.Resource{Used: 1024, Limit: 1024}, []string{"timeout"}
		},
		"warning: the memory of the agent is nearly at its limit": func(r *problems.Readings) { r.Agent.Memory = problems.Resource{Used: 96, Limit: 100} },
		"problem: 10.96.0.10, the first nameserver, cannot be queried: a firewall of this host drops": func(r *problems.Readings) {
			for i := range r.Agent.Servers {
				r.Agent.Servers[i].State, r.Agent.Servers[i].LastErrorAt, r.Agent.Servers[i].Barred = upstream.Down, r.Now, true
			}
		},
		"warning: 10.96.0.10, the first nameserver, does not reply over TCP": func(r *problems.Readings) {
			s := &r.Agent.Servers[0]
			s.TCP.LastError, s.TCP.Since, s.TCP.LastErrorAt = "timeout", r.Now.Add(-time.Minute), r.Now
		},
		"warning: another program removes or changes the capture rules again and again": func(r *problems.Readings) { repaired(r, 10*time.Second, 4) },
		// A problem comes before a warning.
		"problem: /etc/resolv.conf cannot be read ": func(r *problems.Readings) {
			r.Host.Unread, r.Host.Version, r.Host.Running = "permission denied", "v0.2.0", "v0.1.0"
		},
		"problem: the control plane istiod:15012 is not connected": func(r *problems.Readings) { r.Agent.XDS = nds.Status{Address: "istiod:15012"} },
		"warning: the agent rejects the table of the control plane": func(r *problems.Readings) {
			r.Agent.XDS.Rejected, r.Agent.XDS.LastError = 1, "push rejected: no valid protobuf"
		},
		"problem: the control plane istiod:15012 has sent no table": func(r *problems.Readings) { r.Agent.XDS.Loaded = false },
		"problem: mesh names are 3h12m0s old: from the snapshot":    func(r *problems.Readings) { r.Agent.XDS.Stale, r.Agent.XDS.TableAge = true, 11520 },
		"problem: the agent has no nameserver":                      func(r *problems.Readings) { r.Agent.Servers, r.Agent.Self = nil, []string{"127.0.0.1"} },
		"warning: 10.96.0.11, the second nameserver, does not reply": func(r *problems.Readings) {
			r.Agent.Servers[1].State, r.Agent.Servers[1].LastError, r.Agent.Servers[1].LastErrorAt = upstream.Down, "connection refused", r.Now
		},
		"problem: 10.96.0.10, the first nameserver, does not reply": func(r *problems.Readings) {
			for i := range r.Agent.Servers {
				r.Agent.Servers[i].State, r.Agent.Servers[i].LastError, r.Agent.Servers[i].LastErrorAt = upstream.Down, "no reply in time", r.Now
			}
			fail(r, "no nameserver answered", "a.example", "b.example", "c.example")
		},
		"warning: 10.96.0.10, the first nameserver, forwards to this agent": func(r *problems.Readings) { r.Agent.Servers[0].State = upstream.Looping },
		"warning: 10.96.0.10, the first nameserver, answers no query":       func(r *problems.Readings) { r.Agent.Servers[0].Refusing, r.Agent.Servers[0].RefusedAt = true, r.Now },
		"problem: 10.1.0.53, the only nameserver of corp.example, does not reply": func(r *problems.Readings) {
			down := server("10.1.0.53")
			down.Suffix, down.State, down.LastErrorAt = "corp.example", upstream.Down, r.Now
			r.Agent.Servers = append(r.Agent.Servers, down)
		},
		"problem: queries are refused because too many wait": func(r *problems.Readings) { r.Agent.Refusing = true },
		"warning: queries fail: 10.96.0.10: SERVFAIL":        func(r *problems.Readings) { fail(r, "10.96.0.10: SERVFAIL", "a.example", "b.example", "c.example") },
		"problem: the rules for ipv4 cannot be installed": func(r *problems.Readings) {
			r.Agent.Capture.Failed, r.Agent.Capture.Active = map[string]string{"ipv4": "no chain"}, false
		},
		"problem: capture rules cannot be removed; retrying": func(r *problems.Readings) { r.Agent.Capture.Remains = "iptables: busy" },
		"problem: a firewall of this host drops the queries that the agent forwards to 10.96.0.10": func(r *problems.Readings) {
			r.Agent.Capture.Ways = []problems.Way{{Nameserver: netip.MustParseAddr("10.96.0.10"), State: "barred", Detail: "operation not permitted"}}
		},
		"problem: queries of programs to 10.96.0.10 do not reach the agent": func(r *problems.Readings) {
			r.Agent.Capture.Ways = []problems.Way{{Nameserver: netip.MustParseAddr("10.96.0.10"), State: "broken", Detail: "timeout"}}
			r.Host.Ways[0] = problems.Probe{To: "10.96.0.10:53", Network: "udp", State: problems.ProbeOther}
		},
		"warning: nametap cannot check whether queries of programs to 10.96.0.10 reach the agent": func(r *problems.Readings) {
			r.Agent.Capture.Ways = []problems.Way{{Nameserver: netip.MustParseAddr("10.96.0.10"), State: "elsewhere", Detail: "another server"}}
		},
		"problem: the agent does not answer queries of programs to 10.96.0.10": func(r *problems.Readings) {
			r.Agent.Capture.Ways = []problems.Way{{Nameserver: netip.MustParseAddr("10.96.0.10"), State: "silent", Detail: "timeout"}}
		},
		"problem: another agent captures DNS in this network namespace": func(r *problems.Readings) {
			r.Agent.Capture.Others, r.Agent.Capture.Waits = []string{"process 7 of user 0"}, true
		},
		"warning: another agent wants to capture DNS": func(r *problems.Readings) { r.Agent.Capture.Others = []string{"process 7 of user 0"} },
		"warning: the capture was interrupted: the queue of": func(r *problems.Readings) {
			r.Agent.Capture.Lapses = []problems.Lapse{{Cause: problems.LapseQueue, Last: r.Now}}
		},
		"problem: the rules capture nothing now": func(r *problems.Readings) { r.Agent.Capture.Active = false },
		"problem: another server answers the queries of programs to 10.96.0.10:53 over udp": func(r *problems.Readings) {
			r.Host.Ways[0] = problems.Probe{To: "10.96.0.10:53", Network: "udp", State: problems.ProbeOther}
		},
		"problem: queries of this pod over IPv4 are not redirected to the agent": func(r *problems.Readings) {
			r.Host.Ways, r.Host.Unredirected = nil, map[string]string{"IPv4": "no server answers a test query"}
		},
		"problem: queries of programs to 10.96.0.10:53 over tcp have no answer": func(r *problems.Readings) {
			r.Host.Ways[1] = problems.Probe{To: "10.96.0.10:53", Network: "tcp", Error: "timeout"}
		},
	} {
		t.Run(want, func(t *testing.T) {
			r := healthy()
			breaks(r)
			report := problems.Judge(problems.Find(r), nil, nil)
			if len(report.Problems) == 0 {
				t.Fatalf("no problem found; want %q", want)
			}
			first := report.Problems[0]
			if got := string(first.Severity) + ": " + first.What; !strings.HasPrefix(got, strings.TrimSpace(want)) {
				t.Errorf("got %q, want %q", got, want)
			}
			for _, p := range report.Problems {
				if p.Evidence == "" || p.Effect == "" || p.Mend == "" || len(p.Rows) == 0 {
					t.Errorf("incomplete: %+v", p)
				}
			}
			if rest := report.Problems[1:]; slices.ContainsFunc(rest, func(p problems.Problem) bool { return p.Code != first.Code && p.Severity == first.Severity }) {
				t.Errorf("a consequence is not left out: %+v", rest)
			}
		})
	}
}

// R15: what does not concern an agent is skipped, with the reason.
func TestUnread(t *testing.T) {
	r := healthy()
	if unread := problems.Unread(r.Agent); unread[problems.CaptureAbsent] != "" || unread[problems.TokenExpired] == "" {
		t.Errorf("without a token: %v", unread)
	}
	r.Agent.Capture, r.Agent.Token, r.Agent.Memory.Limit = nil, token(r, -time.Minute, time.Hour), 1<<30
	unread := problems.Unread(r.Agent)
	report := problems.Judge(problems.Find(r), nil, unread)
	if unread[problems.TokenExpired] != "" || len(unread) == 0 || len(report.Skipped) != len(unread) || report.Skipped[0].Reason != "the agent installs no rules" {
		t.Errorf("without rules: %v, skipped %v", unread, report.Skipped)
	}
}

// R15: hosts that are odd and have no defect have no problem.
func TestHealthy(t *testing.T) {
	for name, odd := range map[string]func(r *problems.Readings){
		"usual":          func(*problems.Readings) {},
		"no rules":       func(r *problems.Readings) { r.Agent.Capture = nil },
		"capture is off": func(r *problems.Readings) { *r.Agent.Capture = problems.Capture{} },
		"one name fails often": func(r *problems.Readings) {
			fail(r, "10.96.0.10: SERVFAIL", slices.Repeat([]string{"bogus.example"}, 50)...)
		},
		"names of one domain fail": func(r *problems.Readings) {
			fail(r, "10.96.0.10: SERVFAIL", "a.bogus.example", "b.bogus.example", "c.bogus.example", "d.bogus.example")
		},
		"names failed in one second": func(r *problems.Readings) {
			fail(r, "no nameserver answered", "a.example", "b.example", "c.example", "d.example")
			for i := range r.Agent.Failures {
				r.Agent.Failures[i].Time = r.Now.Add(-time.Duration(i) * time.Millisecond)
			}
		},
		"a firewall was loaded":        func(r *problems.Readings) { repaired(r, time.Second, 8) },
		"rules are repaired each hour": func(r *problems.Readings) { repaired(r, time.Hour, 8) },
		"a connection over TCP broke": func(r *problems.Readings) {
			s := &r.Agent.Servers[0]
			s.TCP.LastError, s.TCP.Since, s.TCP.LastErrorAt = "connection reset", r.Now.Add(-time.Second), r.Now
		},
		"many flows, files and bytes": func(r *problems.Readings) {
			many := problems.Resource{Used: 90, Limit: 100}
			r.Agent.Conntrack, r.Agent.Descriptors, r.Agent.Memory = many, many, many
		},
		"names failed a minute ago": func(r *problems.Readings) {
			fail(r, "10.96.0.10: SERVFAIL", "a.example", "b.example", "c.example")
			r.Now = r.Now.Add(time.Minute)
		},
		"a nameserver was down when the last query came": func(r *problems.Readings) {
			r.Agent.Servers[0].State, r.Agent.Servers[0].LastErrorAt = upstream.Down, r.Now.Add(-time.Hour)
			r.Agent.Servers[1].Refusing, r.Agent.Servers[1].RefusedAt = true, r.Now.Add(-time.Hour)
		},
		"a token that is not needed has expired": func(r *problems.Readings) {
			r.Agent.Token, r.Agent.XDS.CertificateExpires = token(r, -2*time.Hour, -time.Hour), r.Now.Add(time.Hour)
		},
		"mDNS without a daemon": func(r *problems.Readings) {
			r.Host.Hosts = []string{"files", "mdns4_minimal", "[NOTFOUND=return]", "dns"}
		},
		"mDNS, and another cluster domain": func(r *problems.Readings) {
			r.Host.Hosts, r.Host.MDNS, r.Host.Domain = []string{"files", "mdns4_minimal", "[NOTFOUND=return]", "dns"}, true, "mesh.example"
		},
		"systemd-resolved":          func(r *problems.Readings) { r.Host.Hosts = []string{"files", "resolve", "[!UNAVAIL=return]"} },
		"no nsswitch.conf":          func(r *problems.Readings) { r.Host.Hosts = nil },
		"a control plane of old":    func(r *problems.Readings) { r.Agent.XDS.TableAge = 90 * 24 * 3600 },
		"pushes were rejected once": func(r *problems.Readings) { r.Agent.XDS.Rejected = 7 },
		"queries were refused once": func(r *problems.Readings) { r.Agent.Refused = 100 },
	} {
		t.Run(name, func(t *testing.T) {
			r := healthy()
			odd(r)
			if report := problems.Judge(problems.Find(r), nil, nil); len(report.Problems) > 0 || len(report.Skipped) > 0 {
				t.Errorf("found %+v, skipped %+v", report.Problems, report.Skipped)
			}
		})
	}
}

// R15: a problem is raised after 15 s in which each reading has shown it, and cleared 15 s after the last one that has.
func TestWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w problems.Window
		bad := []problems.Problem{{Code: problems.NameserverDown, Severity: problems.Severe, Subject: "10.96.0.10"}}
		begun := time.Now()
		step := func(after time.Duration, found []problems.Problem, raised, suspected int) {
			t.Helper()
			time.Sleep(after) //nolint:forbidigo // synctest advances the time
			w.Add(time.Now(), found, nil)
			if r := w.Report(); len(r.Problems) != raised || len(r.Suspected) != suspected {
				t.Errorf("after %v: %d problems, %d suspected; want %d, %d", time.Since(begun), len(r.Problems), len(r.Suspected), raised, suspected)
			}
		}
		step(0, bad, 0, 1)
		step(14*time.Second, bad, 0, 1)
		step(time.Second, nil, 0, 0) // one reading without it: it did not last
		step(time.Second, bad, 0, 1)
		since := time.Now()
		step(10*time.Second, bad, 0, 1)
		step(5*time.Second, bad, 1, 0)
		if got := w.Report().Problems[0].Since; !got.Equal(since) {
			t.Errorf("since %v, want %v", got, since)
		}
		step(14*time.Second, nil, 1, 0)
		step(0, bad, 1, 0) // it flaps
		step(14*time.Second, nil, 1, 0)
		step(time.Second, nil, 0, 0)
		step(time.Second, bad, 0, 1)
	})
}

// R15: each code has one check, in the agent or in the command, and causes come before what they explain.
func TestCodes(t *testing.T) {
	codes := problems.Codes()
	slices.Sort(codes)
	if n := len(codes); len(slices.Compact(codes)) != n {
		t.Errorf("a code has two checks: %v", codes)
	}
}
