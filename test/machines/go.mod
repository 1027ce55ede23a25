module github.com/nametap/nametap/test/machines

go 1.26.0

require (
	github.com/miekg/dns v1.1.73
	github.com/nametap/nametap v0.0.0
	golang.org/x/sys v0.49.0
)

require (
	github.com/cncf/xds/go v0.0.0-20260202195803-dba9d589def2 // indirect
	github.com/envoyproxy/go-control-plane/envoy v1.40.0 // indirect
	github.com/envoyproxy/protoc-gen-validate v1.3.3 // indirect
	github.com/planetscale/vtprotobuf v0.6.1-0.20240319094008-0393e58bdf10 // indirect
	go.yaml.in/yaml/v2 v2.4.4 // indirect
	golang.org/x/text v0.43.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260817212433-ac3dfec99bb1 // indirect
	google.golang.org/grpc v1.85.0 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)

require (
	golang.org/x/net v0.62.0 // indirect
	sigs.k8s.io/yaml v1.6.0
)

replace github.com/nametap/nametap => ../..
