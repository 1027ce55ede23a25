package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/nametap/nametap/bench/lab"

	"github.com/nametap/nametap/bench/report"

	"github.com/miekg/dns"
)

// A flood has floodQueries queries for distinct names. They are sent in floodSeconds over floodSockets sockets. After
// the flood, the nameservers stay silent for floodSilence. The goroutines are counted again floodAfter after the first
// answer of a nameserver.
const (
	floodQueries  = 50_000
	floodSeconds  = 2
	floodSockets  = 8
	floodOwnRate  = 1000 // queries for mesh names per second during the flood
	floodSilence  = 3 * time.Second
	floodAfter    = 10 * time.Second
	probeInterval = 50 * time.Millisecond
)

// slowFlood is the longest duration of a flood without a note in the report.
const slowFlood = floodSeconds * time.Second * 5 / 4

// Names of the figures of a flood.
const (
	floodOwnP99   = "own_p99_ms"
	floodOwnLost  = "own_lost"
	floodPeakMB   = "peak_mb"
	floodRecovery = "recovery_s"
	floodBefore   = "goroutines_before"
	floodPeak     = "goroutines_in_flood"
	floodLater    = "goroutines_after"
)

// floods measures a flood of queries while no nameserver answers.
func (e *experiments) floods(ctx context.Context) error {
	first, second, stop, err := e.twoNameservers()
	if err != nil {
		return err
	}
	defer stop()
	found := map[string]report.Figures{}
	for round := range e.rounds {
		for i := range lab.Compared() {
			p := lab.Compared()[(i+round)%len(lab.Compared())]
			fmt.Fprintf(e.progress, "flood, round %d of %d: %s\n", round+1, e.rounds, p.Name)
			first.Behave(lab.Conduct{})
			second.Behave(lab.Conduct{})
			got, err := e.flooded(ctx, p, func(c lab.Conduct) {
				first.Behave(c)
				second.Behave(c)
			})
			if err != nil {
				return err
			}
			if found[p.Name] == nil {
				found[p.Name] = report.Figures{}
			}
			for name, value := range got {
				found[p.Name].Set(name, round, value)
			}
		}
	}
	e.results.Tables = append(e.results.Tables, e.floodTable(found))
	return nil
}

// flooded measures one server: the flood while nameservers are silent, some seconds
// of silence after it, and their return.
func (e *experiments) flooded(ctx context.Context, p lab.Peer, behave func(lab.Conduct)) (map[string]float64, error) {
	i, _, err := e.lab.StartForwarder(ctx, p, "")
	if err != nil {
		return nil, err
	}
	defer e.lab.Stop(i.Process)
	got := map[string]float64{floodBefore: goroutines(ctx, i.Status)}
	behave(lab.Conduct{Silent: true})
	flooded := make(chan error, 1)
	var took time.Duration
	go func() {
		began := time.Now()
		err := flood(ctx, i.Addr)
		took = time.Since(began)
		flooded <- err
	}()
	own := lab.Load{
		Addr: i.Addr, Queries: e.lab.Path(lab.DirectMix + ".queries"),
		Seconds: floodSeconds, Rate: floodOwnRate, Waiting: floodSeconds * floodOwnRate, Latencies: true,
	}
	t, err := own.Drive(ctx)
	if err != nil {
		return nil, err
	}
	if err := <-flooded; err != nil {
		return nil, err
	}
	if took > slowFlood {
		e.results.note("flood of %s: sending took %v, because the machine is busy", p.Name, took.Round(time.Second/10))
	}
	got[floodPeak] = goroutines(ctx, i.Status)
	got[floodOwnLost] = float64(t.Lost + t.Completed - t.NoError)
	got[floodOwnP99] = float64(t.Quantile(0.99)) / float64(time.Millisecond)
	if err := sleep(ctx, floodSilence); err != nil {
		return nil, err
	}
	behave(lab.Conduct{})
	got[floodRecovery] = recovery(ctx, i.Addr).Seconds()
	if err := sleep(ctx, floodAfter); err != nil {
		return nil, err
	}
	got[floodLater] = goroutines(ctx, i.Status)
	peak, err := lab.PeakMemory(i.Pid)
	if err != nil {
		return nil, err
	}
	got[floodPeakMB] = float64(peak) / (1 << 20)
	return got, i.Alive()
}

// flood sends the queries at a constant rate, and reads and drops the answers.
func flood(ctx context.Context, addr netip.AddrPort) error {
	var dialer net.Dialer
	conns := make([]net.Conn, floodSockets)
	for k := range conns {
		conn, err := dialer.DialContext(ctx, "udp", addr.String())
		if err != nil {
			return fmt.Errorf("flooding: %w", err)
		}
		defer conn.Close()
		go func() { _, _ = io.Copy(io.Discard, conn) }() // ends with the socket
		conns[k] = conn
	}
	name := lab.Distinct("flood")
	began := time.Now()
	for k := range floodQueries {
		wire, err := new(dns.Msg).SetQuestion(name(k), dns.TypeA).Pack()
		if err != nil {
			return fmt.Errorf("flooding: %w", err)
		}
		due := began.Add(time.Duration(k) * floodSeconds * time.Second / floodQueries)
		// The system's timers are too coarse to wait for one query.
		if ahead := time.Until(due); ahead > time.Millisecond {
			if err := sleep(ctx, ahead); err != nil {
				return err
			}
		}
		if _, err := conns[k%len(conns)].Write(wire); err != nil {
			return fmt.Errorf("flooding: %w", err)
		}
	}
	return nil
}

// recovery returns the time until a forwarded query is answered. It sends a query for a new
// name every probeInterval, and returns lab.Patience if there is no answer.
func recovery(ctx context.Context, addr netip.AddrPort) time.Duration {
	ctx, cancel := context.WithTimeout(ctx, lab.Patience)
	defer cancel()
	began := time.Now()
	answered := make(chan time.Time, lab.Patience/probeInterval+1)
	ticker := time.NewTicker(probeInterval)
	defer ticker.Stop()
	name := lab.Distinct("recovery")
	for k := 0; ; k++ {
		go func() {
			if a := lab.Ask(ctx, addr, new(dns.Msg).SetQuestion(name(k), dns.TypeA), lab.Patience); !a.Failed() {
				answered <- time.Now()
			}
		}()
		select {
		case at := <-answered:
			return at.Sub(began)
		case <-ctx.Done():
			return lab.Patience
		case <-ticker.C:
		}
	}
}

// goroutines reads the number of goroutines from a server's metrics, or returns NaN.
func goroutines(ctx context.Context, status netip.AddrPort) float64 {
	values, err := metrics(ctx, status)
	n, ok := values["go_goroutines"]
	if err != nil || !ok {
		return math.NaN()
	}
	return n
}

// metrics reads the metrics of a server, summed over their labels.
func metrics(ctx context.Context, status netip.AddrPort) (map[string]float64, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+status.String()+"/metrics", http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("making a request: %w", err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, fmt.Errorf("reading metrics: %w", err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, fmt.Errorf("reading metrics: %w", err)
	}
	return parseMetrics(string(text))
}

// parseMetrics reads the text format of Prometheus, without time stamps.
func parseMetrics(text string) (map[string]float64, error) {
	sums := map[string]float64{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		at := strings.LastIndexByte(line, ' ')
		if at < 0 || strings.HasPrefix(line, "#") {
			continue
		}
		value, err := strconv.ParseFloat(line[at+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("parsing the metric %q: %w", line, err)
		}
		name, _, _ := strings.Cut(line[:at], "{")
		sums[name] += value
	}
	return sums, nil
}

// floodTable compares the servers.
func (e *experiments) floodTable(found map[string]report.Figures) report.Table {
	t := report.Table{
		Title: fmt.Sprintf("%s distinct queries in %d s while nameservers are silent, medians of %d rounds",
			report.Thousands(floodQueries), floodSeconds, e.rounds),
		Header: []string{
			"server", "mesh names p99 ms", "mesh names lost", "peak MB", "answers again after s",
			"goroutines before", "after the flood", "at the end",
		},
	}
	for _, p := range lab.Compared() {
		row := []string{p.Title}
		for _, name := range []string{floodOwnP99, floodOwnLost, floodPeakMB, floodRecovery, floodBefore, floodPeak, floodLater} {
			row = append(row, report.Cell(found[p.Name][name].Median()))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}
