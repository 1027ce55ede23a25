// Command fixed measures the cost of github.com/miekg/dns: its handler answers every query
// with the same address, over UDP and TCP. A third argument makes it a bad nameserver: after
// SIGUSR1 it loses this share of its replies.
package main

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/signal"
	"strconv"
	"sync/atomic"
	"syscall"

	"github.com/miekg/dns"
)

func main() {
	if len(os.Args) < 3 || len(os.Args) > 4 {
		fmt.Fprintln(os.Stderr, "usage: fixed ADDRESS:PORT IP [LOSS]")
		os.Exit(2)
	}
	var loss float64
	var err error
	if len(os.Args) == 4 {
		loss, err = strconv.ParseFloat(os.Args[3], 64)
	}
	if err == nil {
		err = serve(os.Args[1], net.ParseIP(os.Args[2]), loss)
	}
	fmt.Fprintln(os.Stderr, "fixed:", err)
	os.Exit(1)
}

// serve answers with ip until one of the two servers fails.
func serve(address string, ip net.IP, loss float64) error {
	var lossy atomic.Bool
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	go func() {
		<-signals
		lossy.Store(true)
	}()
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, query *dns.Msg) {
		if lossy.Load() && rand.Float64() < loss {
			return
		}
		reply := new(dns.Msg).SetReply(query)
		if len(query.Question) == 1 {
			header := dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 30}
			reply.Answer = []dns.RR{&dns.A{Hdr: header, A: ip}}
		}
		// The client may have closed its connection.
		_ = w.WriteMsg(reply)
	})
	failed := make(chan error, 2)
	for _, network := range []string{"udp", "tcp"} {
		// No limit, because dnsperf counts the queries of a closed connection as lost.
		server := &dns.Server{Addr: address, Net: network, Handler: handler, MaxTCPQueries: -1}
		go func() { failed <- server.ListenAndServe() }()
	}
	return fmt.Errorf("serving: %w", <-failed)
}
