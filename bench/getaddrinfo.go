package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/bench/lab"

	"github.com/nametap/nametap/bench/report"

	"github.com/miekg/dns"
)

// A libc is a C library whose getaddrinfo is measured.
type libc struct{ name, compiler, pkg string }

// libcs are the C libraries of most images.
func libcs() []libc {
	return []libc{{"glibc", "gcc", "gcc libc6-dev"}, {"musl", "musl-gcc", "musl-tools"}}
}

// A resolving is a server that a pod's queries go to.
type resolving struct {
	title string
	// peer is the server. If it has no name, the server is the nameserver itself.
	peer lab.Peer
}

// resolvings are the compared servers.
func resolvings() []resolving {
	agent := func(settings ...string) lab.Peer {
		return lab.Peer{Name: lab.AgentName, Prepare: lab.PrepareForwardingAgent(settings...)}
	}
	return []resolving{
		{title: "no agent"},
		{title: "Istio's agent", peer: lab.Peer{Name: lab.IstioName, Prepare: lab.PrepareForwardingIstio}},
		{title: "nametap", peer: agent()},
	}
}

// getaddrinfoQueries counts the queries of getaddrinfo in a pod, between client and agent
// and between agent and nameserver, for the first and the second call.
func (e *experiments) getaddrinfoQueries(ctx context.Context) error {
	nameserver, err := lab.StartUpstream(lab.Port53(lab.FirstServer()))
	if err != nil {
		return err
	}
	defer nameserver.Close()
	names := []struct{ what, name string }{
		{"not in the mesh", "www." + strings.TrimSuffix(lab.ExternalDomain, ".")},
		{"in the mesh", "www." + e.lab.Wildcards[0].Name},
	}
	t := report.Table{
		Title:  "Queries of one getaddrinfo, ndots:5 and three search domains: client to agent / agent to nameserver",
		Header: []string{"name, C library"},
	}
	for _, way := range resolvings() {
		t.Header = append(t.Header, way.title, "again")
	}
	for _, n := range names {
		for _, c := range libcs() {
			row := []string{n.what + ", " + c.name}
			binary, err := e.compile(ctx, c)
			if err != nil {
				e.results.note("LEFT OUT: %s: %v; on Debian: apt-get install %s", c.name, err, c.pkg)
				continue
			}
			for _, way := range resolvings() {
				counts, err := e.count(ctx, way, nameserver, []string{binary, n.name})
				if err != nil {
					return fmt.Errorf("%s, %s: %w", c.name, way.title, err)
				}
				row = append(row, counts[0], counts[1])
			}
			t.Rows = append(t.Rows, row)
		}
	}
	e.results.Tables = append(e.results.Tables, t)
	return nil
}

// compile compiles the client.
func (e *experiments) compile(ctx context.Context, c libc) (string, error) {
	binary := e.lab.Path("getaddrinfo-" + c.name)
	_, err := lab.Output(ctx, c.compiler, "-O2", "-o", binary, "getaddrinfo/getaddrinfo.c")
	return binary, err
}

// count runs a client twice, and returns the numbers of queries of both runs.
func (e *experiments) count(ctx context.Context, way resolving, nameserver *lab.Upstream, client []string) (counts [2]string, err error) {
	if err := e.lab.UseNameservers(lab.FirstServer()); err != nil {
		return counts, err
	}
	target := lab.Port53(lab.FirstServer())
	if way.peer.Name != "" {
		i, _, err := e.lab.StartForwarder(ctx, way.peer, "")
		if err != nil {
			return counts, err
		}
		defer e.lab.Stop(i.Process)
		target = i.Addr
	}
	between, err := startCounter(lab.Port53(lab.Address(127, 1)), target)
	if err != nil {
		return counts, err
	}
	defer between.close()
	if err := e.lab.SystemNameservers(lab.Address(127, 1)); err != nil {
		return counts, err
	}
	for k := range counts {
		asked, forwarded := between.queries.Load(), nameserver.Asked.Load()
		if _, err := lab.Output(ctx, client...); err != nil {
			return counts, err
		}
		// A query that the client no longer waits for may still arrive.
		if err := sleep(ctx, 500*time.Millisecond); err != nil {
			return counts, err
		}
		counts[k] = fmt.Sprintf("%d / %d", between.queries.Load()-asked, nameserver.Asked.Load()-forwarded)
		if way.peer.Name == "" {
			counts[k] = strconv.FormatInt(between.queries.Load()-asked, 10)
		}
	}
	return counts, nil
}

// A counter forwards queries over UDP and counts them.
type counter struct {
	conn    *net.UDPConn
	target  netip.AddrPort
	queries atomic.Int64
	running sync.WaitGroup
}

// startCounter starts a counter in front of a server. The caller must close it.
func startCounter(addr, target netip.AddrPort) (*counter, error) {
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(addr))
	if err != nil {
		return nil, fmt.Errorf("starting a counter: %w", err)
	}
	c := &counter{conn: conn, target: target}
	c.running.Go(c.serve)
	return c, nil
}

// close stops the counter.
func (c *counter) close() {
	_ = c.conn.Close()
	c.running.Wait()
}

// serve forwards queries until the socket is closed.
func (c *counter) serve() {
	buf := make([]byte, dns.MaxMsgSize)
	for {
		n, from, err := c.conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		c.queries.Add(1)
		query := append([]byte(nil), buf[:n]...)
		c.running.Go(func() { c.relay(query, from) })
	}
}

// relay sends a query to the server and the answer to the client.
func (c *counter) relay(query []byte, client netip.AddrPort) {
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(c.target))
	if err != nil {
		return // the client times out
	}
	defer conn.Close()
	reply := make([]byte, dns.MaxMsgSize)
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := conn.Write(query); err != nil {
		return
	}
	n, err := conn.Read(reply)
	if err != nil {
		return
	}
	_, _ = c.conn.WriteToUDPAddrPort(reply[:n], client) // the client may have ended
}
