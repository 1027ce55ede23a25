package main

import (
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/bench/lab"
)

// measure starts everything and prints the figures.
func measure(o options) error {
	s, err := newStage()
	if s != nil {
		defer s.end()
	}
	if err != nil {
		return err
	}
	direct := &proxy{name: "direct", addrs: map[int]string{}}
	for _, port := range []int{echoPort, sourcePort, helloPort} {
		direct.addrs[port] = fmt.Sprintf("%s:%d", serverIP, port)
	}
	nametap, err := s.nametap(o.binary)
	if err != nil {
		return err
	}
	haproxy, err := s.haproxy()
	if err != nil {
		return err
	}
	redirectedHAProxy, err := redirected(haproxy, "240.1.0.1")
	if err != nil {
		return err
	}
	nginx, err := s.nginx()
	if err != nil {
		return err
	}
	relay, err := s.relay()
	if err != nil {
		return err
	}
	redirectedRelay, err := redirected(relay, "240.1.0.2")
	if err != nil {
		return err
	}
	all := []*proxy{direct, haproxy, nginx, relay, nametap}
	if o.hold {
		return hold([]*proxy{direct, haproxy, redirectedHAProxy, nginx, relay, redirectedRelay, nametap})
	}
	// The streams are first because the agent drops conntrack entries for 30 s after a change of its rules.
	if o.bytes > 0 {
		if err := streams(o, all); err != nil {
			return err
		}
	}
	if err := besideDNS(o, []*proxy{direct, haproxy, relay, nametap}); err != nil {
		return err
	}
	if err := connections(o, "new connection to the first byte, the server speaks first", echoPort, nil, []*proxy{direct, haproxy, redirectedHAProxy, redirectedRelay, nametap}); err != nil {
		return err
	}
	hello, err := clientHello()
	if err != nil {
		return err
	}
	if err := connections(o, "new connection to the first byte, with SNI", helloPort, hello, []*proxy{direct, nginx, nametap}); err != nil {
		return err
	}
	if o.idle > 0 {
		return idle(o, []*proxy{haproxy, nginx, relay, nametap})
	}
	return nil
}

// hold prints where clients reach the proxies, and waits for a line.
func hold(proxies []*proxy) error {
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	for _, p := range proxies {
		fmt.Fprintf(out, "%s\tpid %d\t%v\n", p.name, p.pid, p.addrs)
	}
	fmt.Fprintf(out, "namespace\tpid %d\n", os.Getpid())
	if err := out.Flush(); err != nil {
		return err
	}
	_, err := os.Stdin.Read(make([]byte, 1))
	return err
}

// median returns the median of the values.
func median[T ~int64 | ~float64](values []T) T {
	values = slices.Clone(values)
	slices.Sort(values)
	return values[len(values)/2]
}

// connections prints the median time from a dial to the first byte, and the processor time of the proxy
// per connection.
func connections(o options, title string, port int, first []byte, proxies []*proxy) error {
	times, used := map[string][]time.Duration{}, map[string][]time.Duration{}
	for range o.rounds {
		for _, p := range proxies {
			before, err := p.processor()
			if err != nil {
				return err
			}
			var round []time.Duration
			for range o.connects {
				took, err := firstByte(p.addrs[port], first)
				if err != nil {
					return fmt.Errorf("%s: %w", p.name, err)
				}
				round = append(round, took)
			}
			after, err := p.processor()
			if err != nil {
				return err
			}
			times[p.name] = append(times[p.name], median(round))
			used[p.name] = append(used[p.name], (after-before)/time.Duration(o.connects))
		}
	}
	fmt.Printf("\n%s: p50, median of %d rounds of %d\n", title, o.rounds, o.connects)
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	base := median(times["direct"])
	for _, p := range proxies {
		t := median(times[p.name])
		fmt.Fprintf(out, "  %s\t%v\tadded %v\tprocessor %v\n", p.name, t, t-base, median(used[p.name]))
	}
	return out.Flush()
}

// processor returns the processor time that the proxy has used.
func (p *proxy) processor() (time.Duration, error) {
	if p.pid == 0 {
		return 0, nil
	}
	return lab.ProcessorTime(p.pid)
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

// streams prints the throughput of one stream, and the processor time per gigabyte.
func streams(o options, proxies []*proxy) error {
	rates, costs := map[string][]float64{}, map[string][]time.Duration{}
	for range o.rounds {
		for _, p := range proxies {
			before, err := p.processor()
			if err != nil {
				return err
			}
			took, err := download(p.addrs[sourcePort], o.bytes)
			if err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
			after, err := p.processor()
			if err != nil {
				return err
			}
			rates[p.name] = append(rates[p.name], float64(o.bytes)/took.Seconds()/1e9)
			costs[p.name] = append(costs[p.name], time.Duration(float64(after-before)*1e9/float64(o.bytes)))
		}
	}
	fmt.Printf("\none stream of %.1f GB: median of %d rounds\n", float64(o.bytes)/1e9, o.rounds)
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	for _, p := range proxies {
		fmt.Fprintf(out, "  %s\t%.2f GB/s\tprocessor %v per GB\n", p.name, median(rates[p.name]), median(costs[p.name]).Round(time.Millisecond))
	}
	return out.Flush()
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

// besideDNS prints the 99th percentile of the times of DNS queries while the agent carries nothing, and while it
// or another proxy carries streams: the other proxy uses the same processors.
func besideDNS(o options, proxies []*proxy) error {
	times := map[string][]time.Duration{}
	for range o.rounds {
		quiet, err := askDNS()
		if err != nil {
			return err
		}
		times["quiet"] = append(times["quiet"], quiet)
		for _, p := range proxies {
			took, err := askBeside(p)
			if err != nil {
				return err
			}
			times[p.name] = append(times[p.name], took)
		}
	}
	fmt.Printf("\np99 of a query to the agent for a mesh name, median of %d rounds: %v\n", o.rounds, median(times["quiet"]))
	for _, p := range proxies {
		fmt.Printf("  beside a stream through %s: %v\n", p.name, median(times[p.name]))
	}
	return nil
}

// askBeside is askDNS while a proxy carries streams.
func askBeside(p *proxy) (time.Duration, error) {
	stop := make(chan struct{})
	var carrying sync.WaitGroup
	carrying.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				_, _ = download(p.addrs[sourcePort], 1<<28) // its errors show in the streams
			}
		}
	})
	took, err := askDNS()
	close(stop)
	carrying.Wait()
	return took, err
}

// askDNS returns the 99th percentile of the times of 2,000 queries. Another process sends them: its goroutines do not
// wait for the goroutines of a stream.
func askDNS() (time.Duration, error) {
	cmd := exec.Command("/proc/self/exe", "-role", "asker")
	cmd.Stderr = os.Stderr
	output, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("asking: %w", err)
	}
	return time.ParseDuration(strings.TrimSpace(string(output)))
}

// ask sends queries, 1 ms apart, and prints the 99th percentile of their times.
func ask() error {
	took, err := percentile(2000)
	if err != nil {
		return err
	}
	fmt.Println(took)
	return nil
}

// percentile sends n queries, 1 ms apart, and returns the 99th percentile of their times.
func percentile(n int) (time.Duration, error) {
	conn, err := dns.Dial("udp", serverIP+":53")
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	var times []time.Duration
	client := dns.Client{Timeout: time.Second}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for range n {
		<-tick.C
		_, took, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion(exactHost+".", dns.TypeA), conn)
		if err != nil {
			return 0, err
		}
		times = append(times, took)
	}
	slices.Sort(times)
	return times[n*99/100], nil
}

// idle prints the memory and the descriptors of each proxy per idle connection.
func idle(o options, proxies []*proxy) error {
	fmt.Printf("\n%d idle connections\n", o.idle)
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	for _, p := range proxies {
		memory, files, err := p.size()
		if err != nil {
			return err
		}
		open := make([]net.Conn, 0, o.idle)
		for i := range o.idle {
			dialer := net.Dialer{}
			conn, err := dialer.Dial("tcp", p.addrs[echoPort])
			if err == nil {
				_, err = io.ReadFull(conn, make([]byte, 1))
			}
			if err != nil {
				return fmt.Errorf("%s, connection %d: %w", p.name, i, err)
			}
			open = append(open, conn)
		}
		time.Sleep(2 * time.Second) // for the collection of garbage
		more, moreFiles, err := p.size()
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "  %s\t%.1f KiB each\t%.2f descriptors each\n", p.name, float64(more-memory)/1024/float64(o.idle), float64(moreFiles-files)/float64(o.idle))
		for _, conn := range open {
			conn.Close()
		}
		time.Sleep(time.Second) // until the proxy has closed its side
	}
	return out.Flush()
}

// size returns the resident memory and the descriptors of a proxy and its children.
func (p *proxy) size() (memory, files int, err error) {
	if memory, err = lab.Memory(p.pid); err != nil {
		return 0, 0, err
	}
	pids := []int{p.pid}
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", p.pid))
	if err != nil {
		return 0, 0, err
	}
	for _, task := range tasks {
		text, _ := os.ReadFile(task) // a thread may have ended
		for word := range strings.FieldsSeq(string(text)) {
			if pid, err := strconv.Atoi(word); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	for _, pid := range pids {
		list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			return 0, 0, err
		}
		files += len(list)
	}
	return memory, files, nil
}
