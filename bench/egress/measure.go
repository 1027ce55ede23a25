package main

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/nametap/nametap/bench/lab"
	"github.com/nametap/nametap/bench/report"
)

// measure starts everything and prints the figures.
func measure(ctx context.Context, o options) (err error) {
	s, err := newStage(ctx)
	if s != nil {
		defer func() { err = errors.Join(err, s.Close()) }()
	}
	if err != nil {
		return err
	}
	proxies, redirected, err := s.proxies(ctx, o.binary)
	if err != nil {
		return err
	}
	hello, err := clientHello()
	if err != nil {
		return err
	}
	// The streams are first because the agent drops conntrack entries for 30 s after a change of its rules.
	stream := func(p *proxy) (time.Duration, error) { return download(p.addrs[sourcePort], o.bytes) }
	if err := o.compare(fmt.Sprintf("One stream of %.1f GB", float64(o.bytes)/1e9), 1, proxies, stream); err != nil {
		return err
	}
	for _, kind := range []struct {
		title   string
		port    int
		first   []byte
		proxies []*proxy
	}{
		{"A new connection to the first byte, the server speaks first", echoPort, nil, slices.Concat(proxies, redirected)},
		{"A new connection to the first byte, with SNI", helloPort, hello, []*proxy{proxies[0], proxies[len(proxies)-1]}},
	} {
		connect := func(p *proxy) (time.Duration, error) { return o.firstBytes(p.addrs[kind.port], kind.first) }
		if err := o.compare(kind.title, o.connects, kind.proxies, connect); err != nil {
			return err
		}
	}
	return idle(o, proxies[1:])
}

// compare prints what f returns for each proxy, and the processor time that the proxy takes for each of the n things that f
// does: medians of the rounds, in which the proxies take turns.
func (o options) compare(title string, n int, proxies []*proxy, f func(*proxy) (time.Duration, error)) error {
	took, used := report.Figures{}, report.Figures{}
	for round := range o.rounds {
		for i := range proxies {
			p := proxies[(i+round)%len(proxies)]
			before, err := p.processor()
			if err != nil {
				return err
			}
			each, err := f(p)
			if err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
			after, err := p.processor()
			if err != nil {
				return err
			}
			took.Set(p.name, round, lab.Microseconds(each))
			used.Set(p.name, round, lab.Microseconds(after-before)/float64(n))
		}
	}
	t := report.Table{Title: fmt.Sprintf("%s, medians of %d rounds of %d", title, o.rounds, n), Header: []string{"", "µs", "processor µs"}}
	for _, p := range proxies {
		t.Rows = append(t.Rows, []string{p.name, report.Cell(took[p.name].Median()), report.Cell(used[p.name].Median())})
	}
	fmt.Print(t.Text())
	return nil
}

// processor returns the processor time that the proxy has used.
func (p *proxy) processor() (time.Duration, error) {
	if p.pid == 0 {
		return 0, nil
	}
	return lab.ProcessorTime(p.pid)
}

// firstBytes returns the median of the times of new connections, one after the other.
func (o options) firstBytes(addr string, first []byte) (time.Duration, error) {
	var times []time.Duration
	for range o.connects {
		took, err := firstByte(addr, first)
		if err != nil {
			return 0, err
		}
		times = append(times, took)
	}
	slices.Sort(times)
	return lab.Quantile(times, 0.5), nil
}

// firstByte dials, sends the bytes in first, and returns the time from the dial to the first byte that it receives.
func firstByte(addr string, first []byte) (time.Duration, error) {
	began := time.Now()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	if len(first) > 0 {
		if _, err := conn.Write(first); err != nil {
			return 0, err
		}
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		return 0, err
	}
	return time.Since(began), nil
}

// clientHello returns a ClientHello of crypto/tls for a name below the wildcard.
func clientHello() ([]byte, error) {
	client, server := net.Pipe()
	defer client.Close()
	defer server.Close()
	go func() { _ = tls.Client(client, &tls.Config{ServerName: belowHost}).Handshake() }() // ends with the pipe
	b := make([]byte, 1<<15)
	n, err := server.Read(b)
	return b[:n], err
}

// download receives n bytes.
func download(addr string, n int64) (time.Duration, error) {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	began := time.Now()
	if _, err := conn.Write(binary.BigEndian.AppendUint64(nil, uint64(n))); err != nil {
		return 0, err
	}
	block := make([]byte, 1<<20)
	var got int64
	for got < n {
		m, err := conn.Read(block)
		if err != nil {
			return 0, fmt.Errorf("after %d of %d bytes: %w", got, n, err)
		}
		got += int64(m)
	}
	return time.Since(began), nil
}

// idle prints the memory of each proxy per idle connection.
func idle(o options, proxies []*proxy) error {
	t := report.Table{Title: fmt.Sprintf("%d idle connections", o.idle), Header: []string{"", "KiB each"}}
	for _, p := range proxies {
		before, err := lab.Memory(p.pid)
		if err != nil {
			return err
		}
		open := make([]net.Conn, 0, o.idle)
		for i := range o.idle {
			conn, err := net.Dial("tcp", p.addrs[echoPort])
			if err == nil {
				_, err = io.ReadFull(conn, make([]byte, 1))
			}
			if err != nil {
				return fmt.Errorf("%s, connection %d: %w", p.name, i, err)
			}
			open = append(open, conn)
		}
		time.Sleep(2 * time.Second) // for the collection of garbage
		after, err := lab.Memory(p.pid)
		if err != nil {
			return err
		}
		t.Rows = append(t.Rows, []string{p.name, report.Cell(float64(after-before) / 1024 / float64(o.idle))})
		for _, conn := range open {
			conn.Close()
		}
		time.Sleep(time.Second) // until the proxy has closed its side
	}
	fmt.Print(t.Text())
	return nil
}
