// Command device-plugin offers GPUs that are not there to a kubelet, for tests.
//
// It speaks the device plugin API v1beta1 as NVIDIA's plugin does: every device has a UUID, is healthy or
// not, and a container is told its devices in NVIDIA_VISIBLE_DEVICES. Which UUIDs are unhealthy stands in a
// file, one a line; it may change at any time, and be absent.
//
// A kubelet that starts removes every socket in its folder. The plugin sees that its own is gone, and then
// listens and registers again.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// How often the socket and the file are looked at: both are local, and a stat costs nothing.
const interval = 100 * time.Millisecond

var (
	resource  = flag.String("resource", "nvidia.com/gpu", "name of the resource")
	devices   = flag.String("devices", "", "UUIDs of the devices, separated by commas")
	unhealthy = flag.String("unhealthy", "", "file with the UUIDs that are unhealthy, one a line")
	folder    = flag.String("folder", api.DevicePluginPath, "kubelet's folder of device plugins")
)

func main() {
	flag.Parse()
	uuids := strings.Split(*devices, ",")
	if *devices == "" || *unhealthy == "" {
		log.Fatal("-devices and -unhealthy are needed")
	}
	for {
		if err := serve(uuids); err != nil {
			log.Printf("%v; trying again", err)
		}
		time.Sleep(interval)
	}
}

// serve registers with the kubelet and serves it until the socket is gone.
func serve(uuids []string) error {
	kubelet := filepath.Join(*folder, "kubelet.sock")
	if _, err := os.Stat(kubelet); err != nil {
		return nil // no kubelet yet
	}
	socket := filepath.Join(*folder, "aviflow-gpu.sock")
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, &plugin{uuids: uuids})
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()
	if err := register(kubelet, filepath.Base(socket)); err != nil {
		return err
	}
	log.Printf("registered %d of %s", len(uuids), *resource)
	for {
		if _, err := os.Stat(socket); err != nil {
			return fmt.Errorf("kubelet has started anew: %w", err)
		}
		time.Sleep(interval)
	}
}

func register(kubelet, socket string) error {
	connection, err := grpc.NewClient("unix://"+kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err = api.NewRegistrationClient(connection).Register(ctx, &api.RegisterRequest{
		Version:      api.Version,
		Endpoint:     socket,
		ResourceName: *resource,
		Options:      &api.DevicePluginOptions{},
	})
	return err
}

type plugin struct {
	api.UnimplementedDevicePluginServer
	uuids []string
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

// ListAndWatch sends the devices at once, and again whenever the health of one changes.
func (p *plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	var sent map[string]bool
	for {
		bad, err := readUnhealthy()
		if err != nil {
			return err
		}
		if sent == nil || !maps.Equal(sent, bad) {
			if err := stream.Send(p.list(bad)); err != nil {
				return err
			}
			log.Printf("sent %d devices, unhealthy: %v", len(p.uuids), bad)
			sent = bad
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-time.After(interval):
		}
	}
}

func (p *plugin) list(bad map[string]bool) *api.ListAndWatchResponse {
	response := &api.ListAndWatchResponse{}
	for _, uuid := range p.uuids {
		health := api.Healthy
		if bad[uuid] {
			health = api.Unhealthy
		}
		response.Devices = append(response.Devices, &api.Device{ID: uuid, Health: health})
	}
	return response
}

// Allocate tells each container its devices, as NVIDIA's plugin does.
func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		ids := container.GetDevicesIds()
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{
			Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(ids, ",")},
		})
	}
	return response, nil
}

// readUnhealthy reads the file; one that is absent names none.
func readUnhealthy() (map[string]bool, error) {
	text, err := os.ReadFile(*unhealthy)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	bad := map[string]bool{}
	for uuid := range strings.FieldsSeq(string(text)) {
		bad[uuid] = true
	}
	return bad, nil
}
