// Command nametap-load sends DNS queries to the first nameserver of resolv.conf at a steady rate, checks every answer, and prints
// a report as JSON. It runs where the queries of an application would: in a virtual machine
// or a pod.
//
//	nametap-load -rate 2000 -for 1m -expect expect.json
//
// With SIGTERM or SIGINT it stops sending, waits for the answers, and prints the report. The
// exit code is 0, whatever the answers are.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"syscall"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/test/machines/lab/load"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "nametap-load:", err)
		os.Exit(1)
	}
}

func run() error {
	expect := flag.String("expect", "", "a JSON file with an Expectation: questions and their right answers")
	lasts := flag.Duration("for", 0, "how long to send (default: until SIGTERM)")
	var config load.Config
	flag.IntVar(&config.Rate, "rate", 2000, "queries a second")
	flag.Float64Var(&config.TCP, "tcp", 0.05, "the share of queries over TCP")
	config.Kept = 0.2
	flag.Parse()
	text, err := os.ReadFile(*expect)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, &config.Expect); err != nil {
		return err
	}
	resolv, err := dns.ClientConfigFromFile("/etc/resolv.conf")
	if err != nil {
		return err
	}
	if len(resolv.Servers) == 0 {
		return errors.New("/etc/resolv.conf has no nameserver")
	}
	if config.Server, err = netip.ParseAddrPort(net.JoinHostPort(resolv.Servers[0], "53")); err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	if *lasts > 0 {
		ctx, cancel = context.WithTimeout(ctx, *lasts)
		defer cancel()
	}
	l, err := load.Start(config)
	if err != nil {
		return err
	}
	<-ctx.Done()
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetIndent("", "  ")
	return encoder.Encode(l.Stop())
}
