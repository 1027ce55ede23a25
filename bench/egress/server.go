package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/bench/lab"
)

// serve is the server behind the proxies. It waits until its namespace has its address.
func serve() error {
	packets, err := net.ListenPacket("udp", serverIP+":53")
	for limit := time.Now().Add(lab.StartLimit); err != nil && time.Now().Before(limit); {
		time.Sleep(50 * time.Millisecond)
		packets, err = net.ListenPacket("udp", serverIP+":53")
	}
	if err != nil {
		return err
	}
	for port, handle := range map[int]func(net.Conn){sourcePort: source, helloPort: answerHello, echoPort: echo} {
		listener, err := net.Listen("tcp", fmt.Sprintf("%s:%d", serverIP, port))
		if err != nil {
			return err
		}
		go accept(listener, handle)
	}
	return dns.ActivateAndServe(nil, packets, dns.HandlerFunc(resolve))
}

func accept(listener net.Listener, handle func(net.Conn)) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return // the process ends
		}
		go func() {
			defer conn.Close()
			handle(conn)
		}()
	}
}

// resolve answers all names below example.com with the server's address.
func resolve(w dns.ResponseWriter, query *dns.Msg) {
	reply, q := new(dns.Msg).SetReply(query), query.Question[0]
	if q.Qtype == dns.TypeA && strings.HasSuffix(strings.ToLower(q.Name), "example.com.") {
		reply.Answer = append(reply.Answer, &dns.A{
			Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 300}, A: net.ParseIP(serverIP),
		})
	} else { // without an SOA record, the answer could not be cached
		reply.Ns = append(reply.Ns, &dns.SOA{
			Hdr: dns.RR_Header{Name: "example.com.", Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: 300},
			Ns:  "ns.example.com.", Mbox: "hostmaster.example.com.", Serial: 1, Refresh: 3600, Retry: 600, Expire: 86400, Minttl: 300,
		})
	}
	_ = w.WriteMsg(reply) // a lost reply shows as a timeout
}

// echo greets with a byte and then echoes.
func echo(conn net.Conn) {
	if _, err := conn.Write([]byte{'.'}); err == nil {
		_, _ = io.Copy(conn, conn) // until the client ends
	}
}

// source reads a number, and sends as many bytes.
func source(conn net.Conn) {
	var n [8]byte
	if _, err := io.ReadFull(conn, n[:]); err != nil {
		return
	}
	block := make([]byte, 1<<20)
	for left := binary.BigEndian.Uint64(n[:]); left > 0; {
		sent, err := conn.Write(block[:min(left, uint64(len(block)))])
		if err != nil {
			return
		}
		left -= uint64(sent)
	}
}

// answerHello reads a record and answers with a byte.
func answerHello(conn net.Conn) {
	var header [5]byte
	if _, err := io.ReadFull(conn, header[:]); err != nil {
		return
	}
	if _, err := io.CopyN(io.Discard, conn, int64(binary.BigEndian.Uint16(header[3:]))); err == nil {
		_, _ = conn.Write([]byte{'.'}) // the client measures what arrives
	}
}
